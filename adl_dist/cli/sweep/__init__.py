"""`adl-dist train --multirun`."""
