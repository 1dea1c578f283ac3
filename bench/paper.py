"""The paper's claims on the simulated chip, its fits, the solver's speed.

python bench/paper.py reproduction          # simulated
python bench/paper.py fit --check           # the simulated chip, from component timings
python bench/paper.py schedules            # the compiler-predicted NPU
python bench/paper.py layouts -m 512 --shapes 2048x8192    # equal shapes of a w8a8 matmul
python bench/paper.py orders               # figure 5: operand orders, by compiled schedules
python bench/paper.py game                 # figure 18: frames of a game on the same GPU
python bench/paper.py graph-life           # a graph's stages, by token count
python bench/paper.py limits               # what the NPU's memory costs
python bench/paper.py solver-speed
"""

from common import new_app
from parts.game import game
from parts.graph_life import graph_life
from parts.limits import limits
from parts.orders import orders
from parts.reproduction import command
from parts.schedules import layouts, schedules
from parts.snapdragon import fit
from parts.solver_speed import solver_speed

app = new_app(__doc__)
app.command("reproduction")(command)
app.command("fit")(fit)
app.command("schedules")(schedules)
app.command("layouts")(layouts)
app.command("orders")(orders)
app.command("game")(game)
app.command("graph-life")(graph_life)
app.command("limits")(limits)
app.command("solver-speed")(solver_speed)

if __name__ == "__main__":
    app()
