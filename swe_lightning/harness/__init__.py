"""What drives the model: mini-SWE-agent, outside the box, talking to the gateway and to a sandbox.

`swe_lightning.harness.mini_swe_agent.run_episode` plays one episode. Nothing here knows rewards, tests or other
rollouts. Importing this package alone is cheap: mini-SWE-agent is imported by the modules that need it.
"""
