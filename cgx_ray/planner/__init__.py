"""Prediction of step times from measured numbers, and the search for plans: no clock, no torch, no Ray."""
