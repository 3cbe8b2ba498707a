"""Takes users' own batch types apart into columns and puts them together again."""
