"""`python -m cgx_ray` is the command `cgx-ray`."""

from cgx_ray.cli import main

main()
