"""Campaigns: long trials with a seed, each a command that prints a table and a JSON line. No test collects them."""
