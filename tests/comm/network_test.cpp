#include "comm/network.h"

#include <gtest/gtest.h>

#include "tessera/comm/error.h"

namespace tessera::comm {
namespace {

TEST(Network, KnowsWhichAddressesTheInternetDoesNotReach) {
  for (const char* host :
       {"127.0.0.1", "127.9.8.7", "10.0.0.1", "10.255.255.255", "172.16.0.1", "172.31.255.1",
        "192.168.7.9", "169.254.1.1", "100.64.0.1", "100.127.0.1", "localhost", "::1", "fe80::1",
        "fd00::7", "fc12::1", "::ffff:10.0.0.1"}) {
    EXPECT_TRUE(is_private(host)) << host;
  }
  for (const char* host :
       {"8.8.8.8", "172.15.0.1", "172.32.0.1", "192.169.0.1", "100.63.0.1", "100.128.0.1",
        "11.0.0.1", "0.0.0.0", "2001:db8::1", "::", "::ffff:8.8.8.8"}) {
    EXPECT_FALSE(is_private(host)) << host;
  }
  EXPECT_THROW(is_private("no such host."), Error);
}

}  // namespace
}  // namespace tessera::comm
