// What the training of a line can be told: the common settings, and one of its own.

#pragma once

#include <tessera/trainer/settings.h>

struct LineSettings : tessera::trainer::Settings {
  double noise = 0.1;  // of the samples
  bool tells = false;  // every figure, as it comes

  LineSettings() {
    batch = 64;
    learning_rate = 0.05;
  }

  tessera::settings::Table table() override {
    tessera::settings::Table table(
        "line [flags]\n\n  tessera run -n 2 -- ./line --steps 500\n\nFits a line to noisy "
        "points.\n\n");
    table.group("training");
    table.add("steps", num_steps, "N", "steps").range(0, 1 << 20);
    table.add("batch", batch, "N", "points per rank and step").range(1, 1 << 20).beside();
    table.add("lr", learning_rate, "X", "learning rate").not_negative().told();
    table.add("noise", noise, "X", "of the points").not_negative().fixed();
    table.add("tell", tells, "", "every figure on standard error");
    add_schedule(table);
    add_checkpoints(table);
    add_seed(table, "of points");
    add_output(table);
    return table;
  }
};
