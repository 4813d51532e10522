"""The viewer: a web page over a samples file, a store or a gateway, or as one file."""

from tokentrue.viewer.data import GatewayData, ViewerData
from tokentrue.viewer.page import Chart, Report, ReportTable, create_app, write_export, write_report
from tokentrue.viewer.sources import FileSource, SampleList, SessionList, StoreSource

__all__ = [
    "Chart",
    "FileSource",
    "GatewayData",
    "Report",
    "ReportTable",
    "SampleList",
    "SessionList",
    "StoreSource",
    "ViewerData",
    "create_app",
    "write_export",
    "write_report",
]
