"""The viewer: a web page over a samples file, a store or a gateway, also exported as one self-contained file."""

from tokentrue.viewer.app import create_app
from tokentrue.viewer.data import ViewerData
from tokentrue.viewer.page import write_export
from tokentrue.viewer.report import Chart, Report, ReportTable, write_report
from tokentrue.viewer.sources import ChosenSessions, FileSource, GatewaySource, SampleList, StoreSource

__all__ = [
    "Chart",
    "ChosenSessions",
    "FileSource",
    "GatewaySource",
    "Report",
    "ReportTable",
    "SampleList",
    "StoreSource",
    "ViewerData",
    "create_app",
    "write_export",
    "write_report",
]
