"""The algorithms, one equation a function, in pure torch. Nothing here loads, prints or remembers anything."""
