"""Arithmetic on arrays that kernels and references share; imports nothing of kvjax."""
