// report/step_pictures.h — where the time of a step goes: bars per rank, and a timeline.

#pragma once

#include <string>
#include <string_view>

#include "report/run_record.h"

namespace tessera::workloads::report {

/// What a phase of the recorder is called in a page; the name itself for one not known here.
std::string_view phase_title(std::string_view phase);
/// The class of the style sheet that colours it.
std::string phase_style(std::string_view phase);

/// Stacked bars of a mean step, one per rank, all on one scale, and the same as a table. Empty
/// without breakdowns.
std::string breakdown_section(const RunRecord& run);

/// The steps of trace.json, one lane per rank and thread. Empty without spans.
std::string timeline_section(const RunRecord& run);

}  // namespace tessera::workloads::report
