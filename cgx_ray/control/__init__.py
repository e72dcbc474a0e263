"""The controller of a training: estimates the network, decides on plans and writes the journal."""
