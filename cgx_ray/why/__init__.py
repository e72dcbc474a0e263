"""Tells what bounds the steps of a training with DDP whose script does not know cgx_ray: `cgx-ray why`."""
