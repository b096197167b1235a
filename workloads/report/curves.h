// report/curves.h — many steps as a curve that a page can hold and an eye can follow.

#pragma once

#include <cstddef>
#include <vector>

#include "report/run_record.h"

namespace tessera::workloads::report {

/// The mean of the values around each, weighted towards the nearest on both sides, so that nothing
/// moves to the right. `reach` is the number of values after which one counts a third. What is not
/// finite counts nothing, and stays as it is.
std::vector<double> smooth(const std::vector<double>& values, double reach);

/// Which of `steps` a page shows: all, or of each of a few hundred stretches those with the least
/// and the largest loss and time, so that peaks stay. In order; the first and the last are there.
std::vector<std::size_t> shown_steps(const std::vector<StepRow>& steps);

/// Of what is finite; missing if nothing is.
double median(std::vector<double> values);

}  // namespace tessera::workloads::report
