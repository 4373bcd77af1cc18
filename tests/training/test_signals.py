"""Ctrl-C in two stages, in a real process."""

from __future__ import annotations

import os
import signal

import pytest

from swe_lightning.errors import Interrupted
from swe_lightning.training.signals import StopOnSignal


def test_the_first_signal_asks_and_the_second_stops() -> None:
    before = signal.getsignal(signal.SIGINT)
    with StopOnSignal() as stop:
        stop.raise_if_requested()
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested
        stop.raise_if_forced()
        with pytest.raises(Interrupted):
            stop.raise_if_requested()
        with pytest.raises(Interrupted) as caught:
            os.kill(os.getpid(), signal.SIGTERM)
        assert caught.value.exit_code == 130
        with pytest.raises(Interrupted):
            stop.raise_if_forced()
    assert signal.getsignal(signal.SIGINT) is before
