from trainyard.api.checkpoints import Checkpoint as Checkpoint
from trainyard.api.checkpoints import evaluate as evaluate
from trainyard.api.checkpoints import evaluate_tasks as evaluate_tasks
from trainyard.api.checkpoints import generate as generate
from trainyard.api.planning import load_run as load_run
from trainyard.api.planning import plan as plan
from trainyard.api.running import prepare as prepare
from trainyard.api.running import train as train
from trainyard.errors import TrainyardError as TrainyardError
from trainyard.report.metrics import read_metrics as read_metrics
from trainyard.sweeps.law import fit_law as fit_law

__version__: str
