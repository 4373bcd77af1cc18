"""From packages and published rows to a training set in which every missing row has a reason.

synth    packages, sdist, trees -> mutations (rules) -> testbed, affected -> synth -> repos, issue_text -> dataset
         manifest: the same from a list of known bugs; make: both, end to end
filter   sources -> filters -> probe -> split -> ledger, report: pipeline
commands what `swel data ...` calls
"""
