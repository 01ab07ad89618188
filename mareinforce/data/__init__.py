"""Where rows come from, and in which order they are trained on."""
