"""Import stand-in for sgl_kernel on a CPU host."""

from sglang_cpu_import_standins import stand_in

__version__ = "9999.0"
stand_in(__name__)
