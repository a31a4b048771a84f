"""Calls of user code with a time limit: reward functions, tools and environments.

There is one module per kind of call:

* Functions that compute run in this thread, one at a time, and are interrupted by an alarm
  (:mod:`qerl.calls.alarm`). Some reward libraries need the main thread, because they use its alarm.
* Comparisons by math-verify, which an alarm cannot always interrupt, run in a subprocess
  (:mod:`qerl.calls.symbolic`).
* Functions that wait for something run beside this thread (:mod:`qerl.calls.beside`): coroutines on one event
  loop, so that a client can be kept between calls, and plain functions in one thread per call.
"""
