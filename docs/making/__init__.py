"""Makers of the documentation: links and docstrings of the site, the page of commands, the map of decisions."""
