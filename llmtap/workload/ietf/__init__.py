"""The five reference workloads of the IETF benchmarking draft, seed 000, 4.3.2 and appendix A.

Where the section and the appendix differ, the appendix is followed, which calls itself complete, and
`describe()["deviations"]` says what the section has.
"""
