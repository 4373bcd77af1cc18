"""Settings every test shares."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# Continuous integration runs on two busy cores: slow input generation says nothing about the code under test.
settings.register_profile("swel", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("swel")
