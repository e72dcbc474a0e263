"""Monitors measure and never decide."""
