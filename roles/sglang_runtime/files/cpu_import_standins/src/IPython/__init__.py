"""Import stand-in for IPython on a CPU host."""

from sglang_cpu_import_standins import stand_in

__version__ = "0.0.0"
stand_in(__name__)
