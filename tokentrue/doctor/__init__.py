"""Probes that find the cause of a mismatch between an engine and the model that a trainer loads."""

from tokentrue.doctor.exam import EngineRoutes
from tokentrue.doctor.examine import examine
from tokentrue.doctor.findings import CAUSES, DoctorReport, Finding, Verdict
from tokentrue.doctor.reference import Reference

__all__ = ["CAUSES", "DoctorReport", "EngineRoutes", "Finding", "Reference", "Verdict", "examine"]
