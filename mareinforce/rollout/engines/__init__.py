"""Engines: what samples completions. Each of them is a `mareinforce.types.Engine`."""
