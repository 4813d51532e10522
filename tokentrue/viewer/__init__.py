"""The viewer: a web page over a samples file, a store or a gateway, and the same page as one self-contained file."""

from tokentrue.viewer.app import create_app
from tokentrue.viewer.data import ViewerData
from tokentrue.viewer.export import write_export
from tokentrue.viewer.report import Chart, Report, ReportTable, write_report
from tokentrue.viewer.sources.gateway import GatewaySource
from tokentrue.viewer.sources.samples import ChosenSessions, FileSource, SampleList
from tokentrue.viewer.sources.store import StoreSource

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
