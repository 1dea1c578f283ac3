"""The paper's claims on the simulated chip, its fit, the solver's speed, formats' quality.

python bench/paper.py reproduction          # simulated
python bench/paper.py fit --check           # the simulated chip, from component timings
python bench/paper.py solver-speed
python bench/paper.py quality --stories DIRECTORY
"""

from common import new_app
from parts.quality import quality
from parts.reproduction import command
from parts.snapdragon import fit
from parts.solver_speed import solver_speed

app = new_app(__doc__)
app.command("reproduction")(command)
app.command("fit")(fit)
app.command("solver-speed")(solver_speed)
app.command("quality")(quality)

if __name__ == "__main__":
    app()
