import os

# Before anything asks torch for a GPU: by NVML, because CUDA's own answer starts the driver. Ranks import these files,
# so it would start before they set the variables that it reads, and a test of these variables would test nothing.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
