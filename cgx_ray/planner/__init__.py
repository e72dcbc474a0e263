"""Predicts step times from measured numbers: pure functions, no clock, no torch, no Ray."""
