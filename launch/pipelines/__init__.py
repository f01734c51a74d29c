"""Phases after one another: RAFT's cycles, which model goes where, what need not run again, what was learned."""
