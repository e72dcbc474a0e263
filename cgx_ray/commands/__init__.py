"""One module per command of `cgx-ray`."""
