"""The tests' models are tiny: more threads than one only wait for each other."""

import torch

torch.set_num_threads(1)
