"""Monitors of ranks, nodes and links. They measure and never decide."""
