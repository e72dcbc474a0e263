"""How published systems decide, one module per paper: for policies that follow a paper, and to compare with."""
