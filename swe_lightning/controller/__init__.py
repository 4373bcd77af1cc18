"""Keeps what runs equal to what the gateway says should run.

`local.run_controller` claims queued rollouts and hands them to warm worker processes on this machine. A worker plays
and grades each rollout and reports one typed Outcome; whatever dies on the way is released and tried again.
"""
