// plan_lines: reads a problem a line, writes a result a line; an error as {"error": text}.

#include <algorithm>
#include <iostream>

#include <nlohmann/json.hpp>

#include "tessera/planner/explain.h"
#include "tessera/planner/planner.h"

int main() {
  namespace planner = tessera::planner;
  std::string line;
  while (std::getline(std::cin, line)) {
    std::string text;
    try {
      const planner::Problem problem = planner::problem_from_json(line);
      text = planner::to_json(problem, planner::plan(problem));
    } catch (const planner::PlanError& error) {
      text = nlohmann::json{{"error", error.what()}}.dump();
    }
    text.erase(std::remove(text.begin(), text.end(), '\n'), text.end());
    std::cout << text << std::endl;
  }
}
