"""Random requests for a while; ``SOAK_REQUESTS=5000`` makes it a long while."""

import os

import pytest
import soak


@pytest.mark.slow
def test_random_requests_under_pressure(crowded_engines, prompts):
    plain, trees = crowded_engines
    num_requests = int(os.environ.get("SOAK_REQUESTS", 32))
    for report in soak.soak(plain, trees, prompts, num_requests, seed=1):
        print(report)
        assert not report.problems()
    assert report.preemptions > 0
    assert report.cancelled > 0
    assert report.accepted > report.rounds
