"""The benchmark of exo (exo-bench): prefill and generation rates over a grid."""
