"""Training without an exchange in every step: ranks train alone, and average what that has changed."""
