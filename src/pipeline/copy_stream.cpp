#include "tessera/pipeline/copy_stream.h"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace tessera::pipeline {
namespace {

c10::Stream current_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

}  // namespace

CopyStream::CopyStream(c10::Device device)
    : stream_(c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device)) {}

CopyStream::Copy CopyStream::run(const std::function<void()>& begin) const {
  const c10::StreamGuard guard(stream_);
  begin();
  c10::Event done(stream_.device_type());
  done.record(stream_);
  return Copy(std::move(done));
}

c10::Stream CopyStream::user() const { return current_stream(stream_.device()); }

void CopyStream::Copy::wait() const { done_.block(current_stream(done_.device())); }

}  // namespace tessera::pipeline
