"""Growing rollout trees: prompts, joint actions, expansion, and the engines that sample."""
