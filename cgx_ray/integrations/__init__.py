"""cgx_ray in trainers that wrap the model themselves. Each module needs the package that it is named after."""
