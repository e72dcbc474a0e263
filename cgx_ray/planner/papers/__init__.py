"""Decisions of published systems, one module per paper: for policies that follow a paper, and to compare with."""
