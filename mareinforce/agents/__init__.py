"""The agents of a team: loading, tokenizing, scoring and saving their models."""
