// tessera/pipeline/copy_stream.h — copies to a device beside what computes there.

#pragma once

#include <functional>
#include <utility>

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include "tessera/core/export.h"

namespace tessera::pipeline {

/// A stream of its own for copies to a GPU. Not collective; for one thread.
class TESSERA_API CopyStream {
 public:
  /// What was begun in one call of `run`.
  class TESSERA_API Copy {
   public:
    /// Lets what the current stream is given from now on wait for the copy; the host does not wait.
    void wait() const;

   private:
    friend class CopyStream;
    explicit Copy(c10::Event done) : done_(std::move(done)) {}
    c10::Event done_;
  };

  explicit CopyStream(c10::Device device);

  /// Calls `begin`, whose copies go to this stream. What it makes belongs to this stream: tell it
  /// of its users by record_stream.
  Copy run(const std::function<void()>& begin) const;

  /// The stream that is current on the device.
  c10::Stream user() const;

 private:
  c10::Stream stream_;
};

}  // namespace tessera::pipeline
