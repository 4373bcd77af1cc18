"""What runs inside a box: the command server and nothing else of swe-lightning.

Standard library only, no import of anything outside this directory, and every import relative: the directory is carried
into boxes as it is (compiled), under whatever Python lies there. The trusted side uses `wire` and nothing more of it.
"""
