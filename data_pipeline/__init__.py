"""From packages and published rows to a training set in which every missing row has a reason.

synth    packages, sdist, trees -> mutations (rules) -> testbed, affected -> synth -> repos, issue_text -> dataset
         manifest: the same from a list of known bugs; make: both, end to end
filter   files, hub -> sources -> scan (store) -> stages, stage_work (validate, probe) -> split -> report, outputs:
         pipeline; every row that leaves: ledger
commands what `swel data ...` calls
"""
