// Child processes: how they ended is known whatever the parent's parent did to SIGCHLD.

#include "common/process.h"

#include <doctest/doctest.h>
#include <unistd.h>

#include <csignal>
#include <string>

#include "common/terminal.h"

using namespace lowkv::cli;

TEST_CASE("a failed helper is no success where SIGCHLD is ignored") {
    for (const auto action : {SIG_DFL, SIG_IGN}) {
        for (const int status : {0, 1, 3, 127}) {
            std::signal(SIGCHLD, action);
            const Output output =
                output_of({"sh", "-c", "printf said; exit " + std::to_string(status)}, false);
            CHECK(output.text == "said");
            CHECK(output.status == status);
            std::signal(SIGCHLD, action);
            CHECK(output_of({"/no/such/program"}, true).status == 127);
        }
    }
}

TEST_CASE("a process that is no child of ours is not waited for") {
    int status = 0;
    CHECK_THROWS_AS(wait_for(getpid(), status, 0), Failure);
}
