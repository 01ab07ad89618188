"""Tasks: reward, formatters, transition and evaluation of one problem each."""
