"""What every test shares: the hypothesis profile and one torch thread per worker's taste."""

import torch
from hypothesis import HealthCheck, settings

settings.register_profile(
    "default", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
settings.load_profile("default")
# The property tests work on tiny tensors, where a second thread only costs.
torch.set_num_threads(1)
