"""Several runs in lock-step, so that the lanes of all of them are stepped side by side.

Every run goes on in a thread of its own, but only one at a time: a run goes as far as its next
question to the clients and waits there (`turns`). When all wait, the steps of all their lanes are taken
together (`stepper`); then each goes on with its own rows (`seats`). To a run this is an engine like any
other. Runs may be of one federation or of several whose models and losses are alike (`alike`): other
data, seeds, methods.
"""

from fmol.lockstep.alike import place_data
from fmol.lockstep.turns import Guest, run_in_lockstep

__all__ = ["Guest", "place_data", "run_in_lockstep"]
