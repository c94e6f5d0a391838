"""Rows of a quantised weight in any format: what packing takes and unpacking gives."""

from ingot.plugins.f8_rows import F8Rows
from ingot.plugins.grouped import GroupedRows
from ingot.plugins.quantised import QuantisedRows
from ingot.plugins.unit_rows import UnitRows

WeightRows = QuantisedRows | GroupedRows | UnitRows | F8Rows
